"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const storeKey = `captionrl-album-${data.fingerprint}`;
  const step = 60; // cards that are added at once
  let edits = new Map();
  let kept = true;
  let visible = [];
  let limit = step;
  let pressed = false;

  function load() {
    if (!kept) return; // what is in memory is newer
    try {
      edits = new Map(JSON.parse(localStorage.getItem(storeKey) ?? "[]"));
    } catch {
      unkept();
    }
  }

  function unkept() {
    kept = false;
    $("note").textContent = "This browser keeps no edits. Export them before you close the page.";
  }

  function element(name, text, className) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text; // never markup
    if (className) made.className = className;
    return made;
  }

  data.cards.forEach((card, key) => (card.key = key)); // an image may have several captions
  const textOf = (card) => edits.get(card.key) ?? card.caption;
  const sameText = (text) => text.toLowerCase().split(/\s+/).join(" ").trim().replace(/[ .]+$/, "");

  function holders() {
    const found = new Map();
    for (const card of data.cards) {
      const key = sameText(textOf(card));
      const owner = card.copy_of ?? card.image_id;
      if (!found.has(key)) found.set(key, new Set());
      found.get(key).add(owner);
    }
    return found;
  }

  const firstOf = new Map();
  for (const card of data.cards) if (!firstOf.has(card.image_id)) firstOf.set(card.image_id, card);

  // Other images with the same text, as it is now.
  function sameAs(card, owners) {
    const text = textOf(card);
    const own = card.copy_of ?? card.image_id;
    return text.trim() ? [...owners.get(sameText(text))].filter((other) => other !== own) : [];
  }

  function problemsOf(card, owners) {
    const found = sameAs(card, owners).length ? ["duplicate"] : [];
    if (!edits.has(card.key)) return found.concat(card.problems.filter((name) => name !== "duplicate"));
    return textOf(card).trim() ? found : ["missing"]; // the scorer has not read an edited text
  }

  function matches(card, owners) {
    const words = $("search").value.trim().toLowerCase();
    const kind = $("problem").value;
    const problems = problemsOf(card, owners);
    const texts = [card.image_id, textOf(card), card.old_caption ?? ""].join("\n").toLowerCase();
    if (words && !texts.includes(words)) return false;
    if (kind === "") return true;
    if (kind === "any") return problems.length > 0 || card.unreadable !== null;
    if (kind === "copy") return card.copy_of !== null;
    if (kind === "changed") return card.old_caption !== null && card.old_caption !== textOf(card);
    if (kind === "edited") return edits.has(card.key);
    return problems.includes(kind);
  }

  function button(text, className, action) {
    const made = element("button", text, className);
    made.type = "button";
    made.addEventListener("click", action);
    return made;
  }

  function names(ids) {
    const links = ids.slice(0, 5).map((id) => button(id, "link", () => enlarge(firstOf.get(id))));
    const found = links.flatMap((link, at) => (at ? [", ", link] : [link]));
    return ids.length > 5 ? [...found, ` and ${ids.length - 5} more`] : found;
  }

  function imageElement(card) {
    const embedded = data.pictures[card.row];
    const picture = element("img");
    picture.src = embedded.source;
    picture.width = embedded.width;
    picture.height = embedded.height;
    picture.alt = "";
    if (embedded.pixelated) picture.className = "pixelated";
    return picture;
  }

  function cardElement(card, owners) {
    const made = element("article");
    made.tabIndex = -1;
    made.dataset.key = card.key;
    if (data.pictures[card.row]) {
      const large = button(undefined, "picture", () => enlarge(card));
      large.setAttribute("aria-label", `Enlarge ${card.image_id}`);
      large.append(imageElement(card));
      made.append(large);
    }
    made.append(element("p", card.image_id, "id"));
    made.append(element("div"), element("p"), element("p", undefined, "rank"));
    fill(made, owners);
    return made;
  }

  // The texts of a card; its other elements stay, so that a click that ends an edit still arrives.
  function fill(made, owners) {
    const card = data.cards[Number(made.dataset.key)];
    const [place, old, shown] = [...made.children].slice(-3);
    if (!place.querySelector("textarea")) {
      const caption = button(textOf(card) || "(no caption)", "caption", () => edit(made));
      caption.dir = "auto";
      caption.title = "Edit";
      if (place.textContent !== caption.textContent) place.replaceChildren(caption);
    }
    const was = card.old_caption !== null && card.old_caption !== textOf(card);
    old.className = "old";
    old.hidden = !was;
    old.dir = "auto";
    old.replaceChildren(...(was ? [element("del", card.old_caption)] : []));
    const facts = element("p");
    if (card.unreadable) facts.append(element("span", `unreadable: ${card.unreadable}`, "wrong"));
    else if (card.decorative && !edits.has(card.key)) facts.append("decorative: it needs no caption ");
    else if (edits.has(card.key)) facts.append("edited; the rank is not known ");
    else if (card.rank !== null) facts.append(element("span", `rank ${card.rank} of ${data.compared} `, card.rank === 1 ? "first" : "wrong"));
    for (const problem of problemsOf(card, owners)) {
      const name = element("span", `${problem} `, "wrong");
      name.title = data.problems[problem];
      facts.append(name);
      if (problem === "duplicate") facts.append("of ", ...names(sameAs(card, owners)), " ");
    }
    if (card.copy_of !== null) facts.append("copy of ", ...names([card.copy_of]));
    else if (card.confused_with.length && !edits.has(card.key)) facts.append("also fits ", ...names(card.confused_with));
    if (shown.textContent !== facts.textContent) shown.replaceChildren(...facts.childNodes);
  }

  function count() {
    $("count").textContent = `${visible.length} of ${data.cards.length} shown${edits.size ? `, ${edits.size} edited` : ""}`;
    const rest = visible.length - limit;
    $("more").hidden = rest <= 0;
    $("more").textContent = `Show ${Math.min(step, rest)} more of ${rest}`;
  }

  function show() {
    const owners = holders();
    visible = data.cards.filter((card) => matches(card, owners));
    $("cards").replaceChildren(...visible.slice(0, limit).map((card) => cardElement(card, owners)));
    count();
  }

  function more() {
    const owners = holders();
    $("cards").append(...visible.slice(limit, limit + step).map((card) => cardElement(card, owners)));
    limit += step;
    count();
  }

  function refresh() {
    const owners = holders();
    for (const made of $("cards").children) fill(made, owners);
    count();
  }

  let large = null; // the card whose picture is enlarged

  function enlarge(card) {
    large = card;
    const dialog = $("large");
    if (data.pictures[card.row]) dialog.querySelector("img").replaceWith(imageElement(card));
    dialog.querySelector("img").hidden = !data.pictures[card.row];
    dialog.querySelector("img").alt = card.image_id;
    dialog.querySelector(".id").textContent = card.image_id;
    dialog.querySelector(".words").textContent = textOf(card) || "(no caption)";
    if (!dialog.open) dialog.showModal();
  }

  function turn(by) {
    const at = visible.indexOf(large);
    const next = visible[Math.max(0, Math.min(at + by, visible.length - 1))];
    if (next) enlarge(next);
  }

  function focused() {
    return document.activeElement?.closest("article");
  }

  function focusOn(key) {
    for (const made of $("cards").children) if (Number(made.dataset.key) === key) made.focus();
  }

  function move(by) {
    const cards = [...$("cards").children];
    const at = cards.indexOf(focused());
    if (by > 0 && at === cards.length - 1 && visible.length > limit) {
      more();
      $("cards").children[at + 1].focus();
      return;
    }
    (cards[at < 0 ? 0 : Math.max(0, Math.min(at + by, cards.length - 1))] ?? document.body).focus();
  }

  function save() {
    try {
      localStorage.setItem(storeKey, JSON.stringify([...edits]));
    } catch {
      unkept();
    }
  }

  function edit(made) {
    const card = data.cards[Number(made.dataset.key)];
    const [place] = [...made.children].slice(-3);
    if (place.querySelector("textarea")) return;
    const box = element("textarea");
    box.value = textOf(card);
    box.setAttribute("aria-label", `Caption of ${card.image_id}`);
    const editor = element("div", undefined, "editor");
    const before = box.value;
    let open = true;
    let stored = false;
    function store(value) {
      load(); // what another tab has edited stays
      const text = value.split(/\s+/).join(" ").trim();
      if (text === card.caption) edits.delete(card.key);
      else edits.set(card.key, text);
      save();
      stored = true;
    }
    function end(accepts, focuses) {
      if (!open) return; // the end takes the focus away, which ends again
      open = false;
      if (accepts) store(box.value);
      else if (stored) store(before);
      else load();
      place.replaceChildren();
      refresh();
      if (focuses) made.focus();
    }
    editor.append(box, button("Save", "", () => end(true, true)), button("Discard", "", () => end(false, true)));
    place.replaceChildren(editor);
    box.focus();
    editor.addEventListener("focusout", (event) => {
      if (!open || editor.contains(event.relatedTarget) || !document.hasFocus()) return;
      store(box.value);
      // The editor stays until the press is over: what was pressed must not move before it is clicked.
      const close = () => setTimeout(() => editor.contains(document.activeElement) || end(true, false));
      if (pressed) document.addEventListener("pointerup", close, { once: true });
      else close();
    });
    box.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Escape" || (event.key === "Enter" && !event.shiftKey && !event.isComposing)) {
        event.preventDefault();
        end(event.key === "Enter", true);
      }
    });
  }

  function download(name, text, type) {
    const link = element("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    $("note").textContent = `${name} has ${data.cards.length} captions. To write text files: captionrl album FOLDER --captions ${name} --sidecars`;
  }

  const safe = (text) => (/^'*[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]/.test(text) ? `'${text}` : text); // no formula of a spreadsheet
  const cell = (text) => `"${safe(text).replaceAll('"', '""')}"`;

  $("csv").addEventListener("click", () => {
    const lines = data.cards.map((card) => `${cell(card.image_id)},${cell(textOf(card))}`);
    download("captions.csv", `\ufeffimage_id,caption\r\n${lines.join("\r\n")}\r\n`, "text/csv");
  });
  $("jsonl").addEventListener("click", () => {
    const lines = data.cards.map((card) => JSON.stringify({ image_id: card.image_id, caption: textOf(card) }));
    download("captions.jsonl", `${lines.join("\n")}\n`, "application/jsonl");
  });
  $("more").addEventListener("click", more);
  $("previous").addEventListener("click", () => turn(-1));
  $("next").addEventListener("click", () => turn(1));
  $("close").addEventListener("click", () => $("large").close());
  $("large").addEventListener("click", (event) => {
    if (event.target === $("large")) $("large").close(); // beside the picture
  });
  for (const id of ["search", "problem"])
    $(id).addEventListener("input", () => {
      limit = step;
      show();
    });
  document.addEventListener("pointerdown", () => (pressed = true), true);
  for (const name of ["pointerup", "pointercancel"]) document.addEventListener(name, () => (pressed = false), true);
  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    if ($("large").open) {
      if (event.key === "ArrowRight") turn(1);
      else if (event.key === "ArrowLeft") turn(-1);
      return;
    }
    if (event.key === "j") move(1);
    else if (event.key === "k") move(-1);
    else if (event.key === "e" && focused()) edit(focused());
    else return;
    event.preventDefault();
  });
  // Another tab has edited the same page.
  window.addEventListener("storage", (event) => {
    if (event.key !== storeKey || document.querySelector("textarea")) return;
    const key = focused()?.dataset.key;
    load();
    show();
    if (key !== undefined) focusOn(Number(key));
  });
  load();
  show();
})();
