"""Adapts training frameworks to elastic worlds. Nothing here imports a framework; the frameworks load their package."""
