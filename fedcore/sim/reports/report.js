document.addEventListener("click", event => {
  const key = event.target.closest('g[id$="-key"]');
  if (!key) return;
  const curve = key.id.match(/^curve-\d+-/)[0], hide = !key.classList.contains("off");
  for (const part of key.closest("svg").querySelectorAll(`g[id^="${curve}"]`)) {
    part.classList.toggle("off", hide);
    part.style.opacity = hide ? (part.id.endsWith("-key") ? 0.4 : 0) : 1;
  }
});
