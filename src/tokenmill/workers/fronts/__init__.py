"""Several API processes over one pool: their owner starts them, and workers have a link to each"""
