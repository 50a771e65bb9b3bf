"""Tests of clusters on several hosts. A package, so that its fixture `cluster` ends with these tests."""
