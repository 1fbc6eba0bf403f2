"""The engine: placements, lanes, units, collectives, optimizer views. Knows `ourshard.config`, nothing above."""
