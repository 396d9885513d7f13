"use strict";
// Without this script every card is shown in full; it only hides.
(() => {
  const cards = [...document.querySelectorAll(".card")];
  const filter = document.getElementById("filter");
  const wrongOnly = document.getElementById("wrong-only");
  const toggles = [...document.querySelectorAll("input[data-method]")];
  const groups = [...document.querySelectorAll(".group")];
  const count = document.getElementById("count");
  const nothing = document.getElementById("nothing");

  function update() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = new Set(toggles.filter((toggle) => toggle.checked).map((toggle) => toggle.dataset.method));
    let visible = 0;
    for (const card of cards) {
      let captions = 0;
      let wrong = false;
      for (const caption of card.querySelectorAll(".caption")) {
        caption.hidden = !shown.has(caption.dataset.method);
        captions += caption.hidden ? 0 : 1;
        wrong = wrong || (!caption.hidden && "wrong" in caption.dataset);
      }
      const matches = words.every((word) => card.dataset.text.includes(word));
      card.hidden = !matches || captions === 0 || Boolean(wrongOnly && wrongOnly.checked && !wrong);
      visible += card.hidden ? 0 : 1;
    }
    for (const group of groups) {
      group.hidden = cards.every((card) => card.hidden || card.dataset.group !== group.dataset.group);
    }
    count.textContent = visible === cards.length ? `${visible} images` : `${visible} of ${cards.length} images`;
    nothing.hidden = visible > 0;
  }

  filter.addEventListener("input", update);
  for (const toggle of [...toggles, wrongOnly]) {
    if (toggle) toggle.addEventListener("change", update);
  }
  document.getElementById("controls").hidden = false;
  update();
})();
