"""The worker's side of the parameter server: requests to servers, and what each mode pulls and pushes."""
