"""`train.fit=logistic`: logistic regression on cached features."""
