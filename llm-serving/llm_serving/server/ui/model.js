// The choice of a model or adapter, if the server offers several. It is kept in this tab.

import { askJson, chosen } from "./api.js";
import { el } from "./dom.js";

/** Fills the list of models, and shows the page again when another one is chosen. */
export async function setUpModel(select) {
  let cards;
  try {
    cards = (await askJson("v1/models", { ofAll: true })).data;
  } catch {
    return; // The views show the error.
  }
  const name = chosen.get().id;
  if (name && !cards.some((card) => card.id === name)) {
    choose(cards[0], cards); // The model was unloaded.
    return;
  }
  select.replaceChildren(...cards.map((card) => el("option", { value: card.id, selected: card.id === name }, card.id)));
  select.hidden = cards.length < 2;
  select.onchange = () => choose(cards[select.selectedIndex], cards);
}

function choose(card, cards) {
  const hasSeveral = cards.filter((each) => !each.parent).length > 1;
  chosen.set({ id: card.id, query: hasSeveral ? (card.parent ?? card.id) : undefined });
  location.reload();
}
