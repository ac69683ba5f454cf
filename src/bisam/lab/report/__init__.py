"""A page of tables and charts from records."""
