"""What freezing costs, and whether it was foretold: plain runs, branched at many moments."""
