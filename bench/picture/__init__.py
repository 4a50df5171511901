"""Pictures of load runs: charts as values, drawn as PNG or as one page to send."""
