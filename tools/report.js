"use strict";
// The layer selector: levels[view] has a digit for each token.
const levels = JSON.parse(document.getElementById("levels").textContent);
const tokens = document.querySelectorAll("#text i");
const view = document.getElementById("view");
view.addEventListener("change", () => {
  const digits = levels[view.selectedIndex];
  tokens.forEach((token, i) => { token.className = token.className.replace(/\ba\d/, "a" + digits[i]); });
});
view.parentElement.hidden = false;
