"""From requests to tokens: schedule, run, sample, report. Token ids only; text belongs elsewhere."""
