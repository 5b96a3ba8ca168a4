"""What failures and saves cost a training, and how often to save: formulas, simulation, published figures."""
