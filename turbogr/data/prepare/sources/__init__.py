"""The built-in sources, a module for each kind of input; `turbogr.plugins` lists them by name."""
