"""a3r: plans, runs and reports whole training studies on swarmtune."""
