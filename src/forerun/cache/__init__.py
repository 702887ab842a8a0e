"""Keys and values of computed positions: who owns which block, and the tensors behind them."""
