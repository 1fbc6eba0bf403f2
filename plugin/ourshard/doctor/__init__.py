"""`ourshard doctor`: look at a machine, measure what training leans on, take a small step, and say what to mend."""
