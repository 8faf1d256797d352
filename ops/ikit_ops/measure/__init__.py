"""What every measurement shares: rates over windows, telemetry beside a round, datasheets."""
