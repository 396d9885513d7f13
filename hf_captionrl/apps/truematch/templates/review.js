"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { bags, images, reasons } = data;
  const reasonNames = Object.keys(reasons);
  const storeKey = `captionrl-review-${data.fingerprint}`;
  const lines = []; // decisions to download
  const done = []; // undo stack: [bag, previous decision]
  const decided = new Map(Object.entries(data.decisions));
  const $ = (id) => document.getElementById(id);
  let at = 0;
  let asking = false;

  function remember(line) {
    decided.delete(line.bag);
    if (line.decision !== null) decided.set(line.bag, { decision: line.decision, reason: line.reason });
  }

  function save(line) {
    lines.push({ ...line, time: new Date().toISOString() });
    try {
      localStorage.setItem(storeKey, JSON.stringify(lines));
    } catch {
      $("hint").textContent = "This browser cannot store decisions. Download them before you close the page.";
    }
    remember(line);
  }

  function decide(decision, reason) {
    const bag = bags[at].id;
    done.push([at, decided.get(bag) ?? { decision: null, reason: null }]);
    asking = false;
    save({ bag, decision, reason });
    at = nextOpen(at) ?? Math.min(at + 1, bags.length - 1);
    show();
  }

  function undo() {
    const last = done.pop() ?? (decided.has(bags[at].id) ? [at, { decision: null, reason: null }] : null);
    asking = false;
    if (last !== null) {
      save({ bag: bags[last[0]].id, ...last[1] });
      at = last[0];
    }
    show();
  }

  function nextOpen(from) {
    for (let step = 1; step <= bags.length; step += 1) {
      const place = (from + step) % bags.length;
      if (!decided.has(bags[place].id)) return place;
    }
    return null;
  }

  function go(place) {
    if (place === null) return;
    asking = false;
    at = Math.max(0, Math.min(place, bags.length - 1));
    show();
  }

  function element(name, text, className) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text; // never markup
    if (className) made.className = className;
    return made;
  }

  let shown = -1;
  function show() {
    const bag = bags[at];
    if (shown !== at) {
      shown = at;
      $("images").replaceChildren(
        ...bag.images.map((row) => {
          const image = images[row];
          const figure = element("figure");
          const well = element("div", undefined, "well");
          const picture = element("img");
          picture.addEventListener("load", () => {
            const small = Math.max(picture.naturalWidth, picture.naturalHeight) <= 128;
            picture.classList.toggle("pixelated", small); // sharp pixels instead of blurred ones
          });
          picture.src = image.source;
          picture.alt = `Image ${image.image_id}`;
          well.append(picture);
          const caption = element("figcaption");
          caption.append(element("code", image.image_id));
          const list = element("ul");
          for (const text of image.captions) {
            const item = element("li", text);
            item.dir = "auto";
            list.append(item);
          }
          caption.append(list);
          figure.append(well, caption);
          return figure;
        }),
      );
      scrollTo(0, 0);
    }
    const values = [...decided.values()];
    const kept = values.filter((value) => value.decision === "keep").length;
    $("count").textContent = `${values.length} of ${bags.length} bags decided · ${kept} kept · ${values.length - kept} dropped`;
    $("progress").value = values.length / bags.length;
    $("place").textContent = `Bag ${at + 1} of ${bags.length}`;
    $("facts").textContent = `${bag.images.length} images · similarity ${bag.similarity.toFixed(3)}`;
    const now = decided.get(bag.id);
    $("verdict").className = `verdict ${now ? now.decision : asking ? "drop" : ""}`;
    $("verdict").textContent = asking
      ? "Drop: choose a reason, or Drop again for none, or Escape to cancel"
      : !now
        ? ""
        : now.decision === "keep"
          ? "Kept"
          : `Dropped${now.reason ? `: ${reasons[now.reason]}` : ""}`;
    document.body.classList.toggle("asking", asking);
  }

  function drop() {
    if (asking) {
      decide("drop", null);
    } else {
      asking = true;
      show();
    }
  }

  const keys = {
    k: () => decide("keep", null),
    d: drop,
    u: undo,
    n: () => go(nextOpen(at)),
    ArrowLeft: () => go(at - 1),
    ArrowRight: () => go(at + 1),
    Escape: () => go(at),
  };
  reasonNames.forEach((name, number) => {
    keys[String(number + 1)] = () => decide("drop", name);
  });
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
    const action = keys[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
  const buttons = { keep: "k", drop: "d", undo: "u", open: "n", previous: "ArrowLeft", next: "ArrowRight" };
  for (const [id, key] of Object.entries(buttons)) $(id).addEventListener("click", () => keys[key]());
  for (const button of document.querySelectorAll("[data-reason]")) {
    button.addEventListener("click", () => decide("drop", button.dataset.reason));
  }
  // A focused button uses only Enter and Space; all other keys reach the page.

  try {
    for (const line of JSON.parse(localStorage.getItem(storeKey) ?? "[]")) {
      lines.push(line);
      remember(line);
    }
  } catch {
    // Storage is disabled or holds something else: start without it.
  }
  $("download").addEventListener("click", () => {
    const text = lines.map((line) => `${JSON.stringify(line)}\n`).join("");
    const link = element("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "application/x-ndjson" }));
    link.download = "decisions.jsonl";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  });
  at = decided.has(bags[0].id) ? (nextOpen(0) ?? 0) : 0;
  show();
})();
