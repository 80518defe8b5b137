// Colours come from the style sheet, so that dark and light are decided in one place.

const isDark = () => getComputedStyle(document.documentElement).colorScheme.trim() === "dark";

function switchTheme() {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
}
