"""The configuration files (a package, so that Hydra and wheels find them)."""
