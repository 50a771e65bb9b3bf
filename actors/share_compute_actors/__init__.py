"""Code of the Ray actors of share-compute, such as contributors, members, coordinators and deployment servers."""
