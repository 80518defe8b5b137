"""The kernels, as TileLang's compiler reads them."""
