"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { questions, pictures } = data;
  const $ = (id) => document.getElementById(id);
  const storeName = (name) => `captionrl-study-${data.study}-${data.part}-${name}`;
  const scales = [...document.querySelectorAll("#task .scale")];
  const shown = [...document.querySelectorAll("#task img")];
  const highest = scales[0].querySelectorAll("input").length;
  const answers = new Map(); // question id -> { values, ms }
  let participant = "";
  let started = "";
  let at = 0;
  let since = 0;
  let downloaded = true;
  let storage = null;

  // --- stored answers ------------------------------------------------------------------------------------------

  function warn(text) {
    $("warning").textContent = text;
    $("warning").hidden = false;
  }

  function store(name, value) {
    if (storage === null) return;
    try {
      storage.setItem(storeName(name), value);
    } catch {
      storage = null;
      warn("This browser cannot keep more answers. Do not close this page before you have downloaded them.");
    }
  }

  function openStorage() {
    try {
      localStorage.setItem("captionrl-study-test", "1");
      localStorage.removeItem("captionrl-study-test");
      storage = localStorage;
    } catch {
      warn("This browser cannot store answers. They are lost if you close the page: answer all questions without a break, and download the answers.");
    }
  }

  function listed() {
    return questions
      .filter((question) => answers.has(question.id))
      .map((question) => ({ question: question.id, ...answers.get(question.id) }));
  }

  function isAnswer(value) {
    return (
      Array.isArray(value?.values) &&
      value.values.length === scales.length &&
      value.values.every((number) => Number.isInteger(number) && number >= 1 && number <= highest) &&
      Number.isInteger(value.ms) &&
      value.ms >= 0
    );
  }

  function restore() {
    answers.clear();
    started = new Date().toISOString();
    try {
      const kept = JSON.parse(storage.getItem(storeName(`of-${participant}`)));
      const known = new Set(questions.map((question) => question.id));
      const good = kept.answers.filter((answer) => known.has(answer.question) && isAnswer(answer));
      for (const { question, values, ms } of good) answers.set(question, { values, ms });
      started = new Date(kept.started).toISOString();
    } catch {
      // Nothing is stored, or something else: start again.
    }
  }

  // --- the screens ---------------------------------------------------------------------------------------------

  function screen(name) {
    for (const id of ["start", "task", "end"]) $(id).hidden = id !== name;
    scrollTo(0, 0);
  }

  function chosen() {
    return scales.map((scale) => Number(scale.querySelector("input:checked")?.value ?? 0));
  }

  function show(number) {
    at = number;
    if (at >= questions.length) {
      screen("end");
      $("thanks").focus();
      return;
    }
    const question = questions[at];
    const before = answers.get(question.id);
    screen("task");
    $("caption").textContent = question.caption.trim() || "(no caption)"; // text, never markup
    $("caption").classList.toggle("empty", !question.caption.trim());
    shown.forEach((element, place) => {
      const picture = pictures[question.images[place]];
      element.src = picture.source;
      element.classList.toggle("pixelated", picture.pixelated);
    });
    scales.forEach((scale, place) => {
      for (const input of scale.querySelectorAll("input")) input.checked = before?.values[place] === Number(input.value);
    });
    $("count").textContent = `Question ${at + 1} of ${questions.length}`;
    $("progress").value = answers.size;
    $("back").disabled = at === 0;
    $("status").textContent = "";
    $("caption").focus({ preventScroll: true });
    since = performance.now();
  }

  function confirm() {
    const values = chosen();
    if (values.includes(0)) {
      $("status").textContent = data.kind === "retrieval" ? "Choose an image first." : "Rate all three first.";
      return;
    }
    const { id } = questions[at];
    const ms = Math.round(performance.now() - since) + (answers.get(id)?.ms ?? 0);
    answers.set(id, { values, ms });
    downloaded = false;
    store(`of-${participant}`, JSON.stringify({ started, answers: listed() }));
    show(at + 1);
  }

  function choose(number) {
    // The first scale without a rating, so that 4, 5, 3 rates all three; if there is none, the focused scale.
    const open = scales.findIndex((scale, place) => chosen()[place] === 0);
    const focused = scales.findIndex((scale) => scale.contains(document.activeElement));
    const scale = scales[open >= 0 ? open : Math.max(focused, 0)];
    const input = scale.querySelector(`input[value="${number}"]`);
    if (input === null) return;
    input.checked = true;
    input.focus();
    $("status").textContent = "";
  }

  // --- the file ------------------------------------------------------------------------------------------------

  // FNV-1a, 32 bits: detects changes of the file.
  function checksum(text) {
    let state = 0x811c9dc5;
    for (const byte of new TextEncoder().encode(text)) state = Math.imul(state ^ byte, 0x01000193) >>> 0;
    return state.toString(16).padStart(8, "0");
  }

  function download() {
    const exported = new Date().toISOString();
    const given = listed();
    const head = { format: data.format, study: data.study, part: data.part, participant, started, exported };
    const lines = [data.study, data.part, participant, started, exported];
    for (const { question, values, ms } of given) lines.push(`${question} ${values.join(",")} ${ms}`);
    const value = { ...head, answers: given, checksum: checksum(lines.join("\n")) };
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([`${JSON.stringify(value, null, 1)}\n`], { type: "application/json" }));
    link.download = `answers-${data.part}-${participant}.json`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
    downloaded = true;
    const text = `${link.download}: ${given.length} of ${questions.length} questions answered.`;
    $("saved").textContent = text;
    $("status").textContent = text;
  }

  // --- events --------------------------------------------------------------------------------------------------

  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    participant = $("participant").value;
    store("last", participant);
    restore();
    const open = questions.findIndex((question) => !answers.has(question.id));
    show(open < 0 ? questions.length : open);
  });
  $("confirm").addEventListener("click", confirm);
  $("back").addEventListener("click", () => show(Math.max(at - 1, 0)));
  $("again").addEventListener("click", () => show(questions.length - 1));
  $("partial").addEventListener("click", download);
  $("download").addEventListener("click", download);
  addEventListener("keydown", (event) => {
    if ($("task").hidden || event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
    if (/^[0-9]$/.test(event.key)) {
      event.preventDefault();
      choose(event.key === "0" ? 10 : Number(event.key));
    } else if (event.key === "Enter" && !(event.target instanceof HTMLButtonElement)) {
      event.preventDefault();
      confirm();
    }
  });
  addEventListener("beforeunload", (event) => {
    if (storage === null && !downloaded) event.preventDefault();
  });

  openStorage();
  try {
    $("participant").value = storage.getItem(storeName("last")) ?? "";
  } catch {
    // No storage.
  }
})();
