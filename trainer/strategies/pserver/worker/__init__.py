"""A worker's side: requests to servers, and what each mode pulls and pushes."""
