"""How good diagnosis is: what terminals show of failures, and whether root causes are right."""
