// Takes the parts of a newer page over, and leaves the reader where they are: what is open, scrolled to, or in focus.
function follow(milliseconds) {
  const button = document.getElementById("pause"), status = document.getElementById("status");
  const news = document.getElementById("news");
  let paused = false, known = "";
  button.addEventListener("click", () => {
    paused = !paused;
    button.setAttribute("aria-pressed", String(paused));
    status.textContent = paused ? "Updates are paused." : "";
  });
  function place(element) {
    const section = element.closest("details, figure, section");
    return section && section.id ? [section.id, element.tagName, element.getAttribute("aria-label")] : null;
  }
  function take(text) {
    const next = new DOMParser().parseFromString(text, "text/html"), main = document.getElementById("main");
    const open = new Map([...main.querySelectorAll("details[id]")].map((each) => [each.id, each.open]));
    const scrolled = new Map([...main.querySelectorAll(".scroll")].map((each) => [each.getAttribute("aria-label"), each.scrollLeft]));
    const focus = main.contains(document.activeElement) ? place(document.activeElement) : null;
    main.innerHTML = next.getElementById("main").innerHTML;
    for (const id of ["subtitle"]) document.getElementById(id).textContent = next.getElementById(id).textContent;
    document.querySelector("nav").innerHTML = next.querySelector("nav").innerHTML;
    for (const each of main.querySelectorAll("details[id]")) if (open.has(each.id)) each.open = open.get(each.id);
    for (const each of main.querySelectorAll(".scroll")) each.scrollLeft = scrolled.get(each.getAttribute("aria-label")) || 0;
    if (focus) {
      const parent = document.getElementById(focus[0]);
      const again = parent && [...parent.querySelectorAll(focus[1])].find((each) => each.getAttribute("aria-label") === focus[2]);
      if (again) again.focus({ preventScroll: true });
    }
  }
  async function turn() {
    if (!paused) {
      try {
        const answer = await fetch(location.pathname, { cache: "no-store" });
        const text = await answer.text();
        if (!answer.ok) throw new Error(text);
        const steps = (text.match(/<p class="muted" id="subtitle">([^<]*)/) || [])[1] || "";
        take(text);
        // Screen readers say it when a step has ended, not with every figure; others see it at the top.
        if (known && steps !== known) news.textContent = steps;
        if (status.dataset.lost) status.textContent = "";
        known = steps;
        delete status.dataset.lost;
      } catch (error) {
        status.dataset.lost = "1";
        status.textContent = "The report cannot be brought up to date: its server does not answer. This is what was known last.";
      }
    }
    setTimeout(turn, milliseconds);
  }
  setTimeout(turn, milliseconds);
}
