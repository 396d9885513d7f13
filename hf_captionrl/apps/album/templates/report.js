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

  function problemsOf(card, owners) {
    const text = textOf(card);
    if (!edits.has(card.key)) return card.problems;
    if (!text.trim()) return ["missing"];
    return owners.get(sameText(text)).size > 1 ? ["duplicate"] : []; // the scorer has not read an edited text
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

  function cardElement(card, owners) {
    const made = element("article");
    made.tabIndex = 0;
    made.dataset.key = card.key;
    const embedded = data.pictures[card.row];
    if (embedded) {
      const picture = element("img");
      picture.src = embedded.source;
      picture.width = embedded.width;
      picture.height = embedded.height;
      picture.alt = "";
      if (embedded.pixelated) picture.className = "pixelated";
      made.append(picture);
    }
    made.append(element("p", card.image_id, "id"));
    const caption = element("p", textOf(card) || "(no caption)", "caption");
    caption.dir = "auto";
    made.append(caption);
    if (card.old_caption !== null && card.old_caption !== textOf(card)) {
      const old = element("p", undefined, "old");
      old.dir = "auto";
      old.append(element("del", card.old_caption));
      made.append(old);
    }
    const facts = element("p", undefined, "rank");
    if (card.unreadable) facts.append(element("span", `unreadable: ${card.unreadable}`, "wrong"));
    else if (edits.has(card.key)) facts.append("edited; the rank is not known ");
    else if (card.rank !== null) facts.append(element("span", `rank ${card.rank} of ${data.compared} `, card.rank === 1 ? "first" : "wrong"));
    for (const problem of problemsOf(card, owners)) {
      const name = element("span", `${problem} `, "wrong");
      name.title = data.problems[problem];
      facts.append(name);
    }
    if (card.copy_of !== null) facts.append(`copy of ${card.copy_of} `);
    else if (card.confused_with.length && !edits.has(card.key)) facts.append(`also fits ${card.confused_with.join(", ")}`);
    made.append(facts);
    return made;
  }

  function show() {
    const owners = holders();
    visible = data.cards.filter((card) => matches(card, owners));
    $("cards").replaceChildren(...visible.slice(0, limit).map((card) => cardElement(card, owners)));
    $("more").hidden = visible.length <= limit;
    $("count").textContent = `${visible.length} of ${data.cards.length} shown${edits.size ? `, ${edits.size} edited` : ""}`;
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
      limit += step;
      show();
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
    const box = element("textarea");
    box.value = textOf(card);
    box.setAttribute("aria-label", `Caption of ${card.image_id}`);
    made.querySelector(".caption").replaceWith(box);
    box.focus();
    box.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Escape" || (event.key === "Enter" && !event.shiftKey && !event.isComposing)) {
        event.preventDefault();
        load(); // what another tab has edited stays
        if (event.key === "Enter") {
          const text = box.value.split(/\s+/).join(" ").trim();
          if (text === card.caption) edits.delete(card.key);
          else edits.set(card.key, text);
          save();
        }
        show();
        focusOn(card.key);
      }
    });
  }

  function download(name, text, type) {
    const link = element("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  const safe = (text) => (/^'*[=+\-@\t\r]/.test(text) ? `'${text}` : text); // no formula of a spreadsheet
  const cell = (text) => `"${safe(text).replaceAll('"', '""')}"`;

  $("csv").addEventListener("click", () => {
    const lines = data.cards.map((card) => `${cell(card.image_id)},${cell(textOf(card))}`);
    download("captions.csv", `\ufeffimage_id,caption\r\n${lines.join("\r\n")}\r\n`, "text/csv");
  });
  $("jsonl").addEventListener("click", () => {
    const lines = data.cards.map((card) => JSON.stringify({ image_id: card.image_id, caption: textOf(card) }));
    download("captions.jsonl", `${lines.join("\n")}\n`, "application/jsonl");
  });
  $("more").addEventListener("click", () => {
    limit += step;
    show();
  });
  for (const id of ["search", "problem"])
    $(id).addEventListener("input", () => {
      limit = step;
      show();
    });
  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
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
