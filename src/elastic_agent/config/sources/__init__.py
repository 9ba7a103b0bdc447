"""Where settings come from: a module for each source."""
