"""The protocol, pure: records, who decides what, who gets which rank. No torch, no threads, no clock."""
