"""The application: routes, bodies, limits, errors."""
