"use strict";
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const name = () => { button.textContent = dark() ? "Light" : "Dark"; button.setAttribute("aria-label", `Show in ${dark() ? "light" : "dark"} colors`); };
  button.hidden = false;
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);
  name();

  const local = (seconds) => new Date(1000 * seconds).toLocaleString();
  for (const time of document.querySelectorAll("time")) time.title = `${local(Date.parse(time.dateTime) / 1000)} local time`;

  // Titles of marks, at once and where fingers and keys reach them; without this script the browser shows them itself.
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);
  for (const title of document.querySelectorAll("svg.plot title")) {
    title.parentNode.dataset.tip = title.textContent;
    if (!title.parentNode.hasAttribute("aria-label")) title.parentNode.setAttribute("aria-label", title.textContent);
    title.remove();
  }
  const show = (text, x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - box.width - 4))}px`;
    tip.style.top = `${y + 18 + box.height > innerHeight ? y - box.height - 12 : y + 18}px`;
  };
  const hide = () => { tip.hidden = true; };
  document.addEventListener("focusin", (event) => {
    const mark = event.target.closest("[data-tip]");
    if (mark) { const box = mark.getBoundingClientRect(); show(mark.dataset.tip, box.left, box.bottom - 14); } else hide();
  });
  document.addEventListener("pointermove", (event) => {
    const mark = event.target.closest("[data-tip]");
    const canvas = event.target.closest(".canvas");
    for (const each of document.querySelectorAll(".cursor")) if (!canvas || each.parentNode !== canvas) each.hidden = true;
    if (canvas) {
      const box = canvas.getBoundingClientRect();
      const share = (event.clientX - box.left) / box.width;
      const at = Number(canvas.dataset.began) + share * (canvas.dataset.ended - canvas.dataset.began);
      let cursor = canvas.querySelector(".cursor");
      if (!cursor) { cursor = document.createElement("div"); cursor.className = "cursor"; canvas.append(cursor); }
      cursor.hidden = false;
      cursor.style.left = `${100 * share}%`;
      const utc = new Date(1000 * at).toISOString().slice(0, 19).replace("T", " ");
      show(mark ? mark.dataset.tip : `${utc} UTC, ${local(at)} local time`, event.clientX, event.clientY);
    } else if (mark) show(mark.dataset.tip, event.clientX, event.clientY); else hide();
  });
  document.addEventListener("pointerleave", hide);
  addEventListener("scroll", hide, { passive: true });

  // What is folded away is shown when a link leads to it.
  const reveal = () => {
    const target = document.getElementById(location.hash.slice(1));
    const folded = target && target.closest("details");
    if (folded && !folded.open) { folded.open = true; target.scrollIntoView(); }
  };
  addEventListener("hashchange", reveal);
  reveal();

  // A figure fits any width, so a wider one is a closer look.
  for (const scroller of document.querySelectorAll(".scroller")) {
    const canvas = scroller.firstElementChild;
    let factor = 1;
    const zoom = (to) => {
      const middle = (scroller.scrollLeft + scroller.clientWidth / 2) / scroller.scrollWidth;
      factor = Math.max(1, Math.min(32, to));
      canvas.style.width = `${100 * factor}%`;
      scroller.scrollLeft = middle * scroller.scrollWidth - scroller.clientWidth / 2;
    };
    const bar = document.createElement("div");
    bar.className = "zoom";
    for (const [sign, label, by] of [["−", "Show more time", 0.5], ["+", "Look closer", 2]]) {
      const press = document.createElement("button");
      press.type = "button";
      press.textContent = sign;
      press.setAttribute("aria-label", label);
      press.addEventListener("click", () => zoom(factor * by));
      bar.append(press);
    }
    scroller.parentNode.append(bar);
  }
})();
