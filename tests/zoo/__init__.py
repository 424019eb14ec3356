"""Small models and training steps of every kind; `docs/zoo.md` lists them."""
