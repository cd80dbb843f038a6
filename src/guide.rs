//! The code of the guide, compiled and run as tests.

#[doc = include_str!("../docs/guide/src/first-run.md")]
mod first_run {}

#[doc = include_str!("../docs/guide/src/recipes.md")]
mod recipes {}

#[doc = include_str!("../docs/guide/src/from-burn.md")]
mod from_burn {}

#[doc = include_str!("../docs/guide/src/memory.md")]
mod memory {}

#[doc = include_str!("../docs/guide/src/report.md")]
mod report {}

#[doc = include_str!("../docs/guide/src/does-not-fit.md")]
mod does_not_fit {}

#[doc = include_str!("../docs/guide/src/results.md")]
mod results {}

#[doc = include_str!("../docs/guide/src/recompute.md")]
mod recompute {}

#[doc = include_str!("../docs/guide/src/half.md")]
mod half {}

#[doc = include_str!("../docs/guide/src/parked.md")]
mod parked {}

#[doc = include_str!("../docs/guide/src/prediction.md")]
mod prediction {}

#[doc = include_str!("../docs/guide/src/custom-loops.md")]
mod custom_loops {}

#[doc = include_str!("../docs/guide/src/ranks.md")]
mod ranks {}

#[doc = include_str!("../docs/guide/src/questions.md")]
mod questions {}
