//! Plans how many micro-batches a batch is split into, from a memory budget and footprints.
//!
//! Third stage in the life of a batch: the step has been recorded, its footprint is known, and this
//! crate decides how many micro-batches to run. It knows no backend, no model and no device. A
//! function supplies the footprints, labels name what holds the memory, and the result is plain
//! data. Only `host_memory.rs`, `limits.rs` and `resident.rs` query the machine.
//!
//! Example: a batch of 100 images, 2 GiB for the model and its optimizer, 200 MiB per image, and an
//! 8 GiB card of which 90 % may be used.
//!
//! ```
//! use firebox_plan::{Accumulating, Budget, MemoryInfo, Need, PlanOptions, Role, plan};
//! use firebox_trace::{Bytes, Items};
//!
//! let card = MemoryInfo::new(Bytes::gib(8), Bytes::gib(7), "an 8 GiB card");
//! let budget = Budget::fraction(0.9).resolve(&card)?;
//!
//! let plan = plan(Items::new(100), budget, &PlanOptions::new(), |split| {
//!     let state = match split.accumulating() {
//!         Accumulating::No => Bytes::mib(2048),
//!         // Includes the gradients of earlier micro-batches.
//!         Accumulating::Yes => Bytes::mib(2048 + 512),
//!     };
//!     let activations = Bytes::mib(200) * split.largest().get() as u64;
//!     Ok::<_, std::convert::Infallible>(
//!         Need::exact(state + activations)
//!             .holding("parameters and optimizer state", Role::State, state)
//!             .holding("activations", Role::Activations, activations),
//!     )
//! })?;
//!
//! assert_eq!(plan.to_string(), "100 = 5 x 20");
//! assert_eq!(plan.peak(), Bytes::mib(2560 + 20 * 200));
//! for range in plan.ranges() {
//!     assert_eq!(range.len(), 20); // run the items of this range, add up their gradients
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod advice;
mod budget;
mod host_memory;
mod limits;
mod need;
mod options;
mod planner;
mod resident;
mod step_log;

mod answers;
mod ladder;
mod split;

#[doc(hidden)]
pub mod checker;
mod error;
mod outcome;

pub use advice::Advice;
pub use budget::{Budget, BudgetError, MemoryInfo};
pub use error::{DoesNotFit, FixedDoesNotFit, PlanError, Remedy};
pub use firebox_trace::Estimate;
pub use host_memory::{HostMemoryError, host_memory};
pub use need::{Accumulating, Holding, Need, Oversized, ParkedNeed, RecomputedNeed, Role};
pub use options::{PlanOptions, Probing, Sizing};
pub use outcome::{Answer, Plan};
pub use planner::{plan, plan_at_once};
pub use resident::Resident;
pub use split::{Run, Split};
pub use step_log::{LogNotWritten, StepLog, StepUse};
