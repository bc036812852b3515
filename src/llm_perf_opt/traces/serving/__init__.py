"""What load generators and servers write: records of requests, spans, scraped metrics."""
