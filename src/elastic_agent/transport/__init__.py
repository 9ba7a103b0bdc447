"""The only code that talks to a store. One small interface (:mod:`.base`), one module per store."""
