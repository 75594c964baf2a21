"""Where jobs run: one module per choice of `conf/launcher`."""
