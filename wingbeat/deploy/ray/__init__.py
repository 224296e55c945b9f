"""Running a server's processes on a Ray cluster (``wingbeat deploy ray``).

Ray places the processes and starts them again elsewhere when a node dies; what they say to each other is our own worker
protocol, as everywhere.  Only this package imports ray.
"""
