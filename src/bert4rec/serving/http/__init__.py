"""From the network to the service: access checks, routes, JSON in and out."""
