// Renders the equations of a page. `pymdownx.arithmatex` has marked them: \(...\) in a line, \[...\] on their own.
document$.subscribe(() => {
  for (const element of document.querySelectorAll(".arithmatex")) {
    const text = element.textContent.trim();
    const options = { displayMode: text.startsWith("\\["), throwOnError: false };
    katex.render(text.slice(2, -2), element, options);
  }
});
