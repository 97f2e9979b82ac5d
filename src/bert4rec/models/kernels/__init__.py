"""The computations of the models, faster: each is tested to equal the plain form."""
