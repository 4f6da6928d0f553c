"""Measurements that show what a part of the engine is good for. Nothing is loaded before it is asked for."""
