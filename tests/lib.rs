//! Tests and benchmarks of firebox, in a package of their own: what they need is not built for an
//! example.
