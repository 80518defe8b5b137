// Evaluated in a page: texts with less contrast to what is behind them than WCAG's 4.5, and controls without a name.
(() => {
  const parse = (colour) => colour.match(/[\d.]+/g).map(Number);
  const linear = (x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  const luminance = (rgb) =>
    rgb.slice(0, 3).reduce((sum, x, i) => sum + linear(x / 255) * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const colour = parse(getComputedStyle(element).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const hasText = (element) =>
    [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.textContent.trim());
  const isFaint = (element) => {
    const [light, dark] = [parse(getComputedStyle(element).color), behind(element)]
      .map(luminance)
      .sort((a, b) => b - a);
    return (light + 0.05) / (dark + 0.05) < 4.5;
  };
  const shown = [...document.querySelectorAll("body *")].filter(
    (element) => element.checkVisibility() && !element.closest("svg, script"),
  );
  const isUnnamed = (control) => !control.labels?.length && !control.ariaLabel && !control.textContent.trim();
  return {
    faint: shown
      .filter((element) => hasText(element) && isFaint(element))
      .map((element) => `${element.tagName} ${element.textContent.slice(0, 20)}`),
    unnamed: shown
      .filter((element) => element.matches("button, input, select") && isUnnamed(element))
      .map((element) => element.id),
  };
})();
