"""Inline PTX, as functions of MLIR values. Only `mosaic` calls them."""
