"""The visual explainer: the tile steps of the real NumPy kernel, recorded, as one HTML page (`tilewise explain`)."""
