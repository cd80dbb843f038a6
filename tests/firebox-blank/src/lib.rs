//! A CUDA driver that computes nothing but keeps books. It runs burn's real CUDA backend on a
//! machine without a GPU, for tests only.
//!
//! cubecl-cuda loads `libcuda` and `libnvrtc` at run time; firebox loads `libnvidia-ml`. This crate
//! builds one library with the functions they call in all three. On the library path of a child
//! process, it runs the child's whole CUDA stack: fusion, autotune, the server, streams, pinned
//! memory and the allocator. Only the kernels do not run, and every read returns zeros.
//!
//! ```no_run
//! use firebox_blank::{Blank, Device, Settings};
//!
//! let settings = Settings::new([Device::new("RTX 3070", 8 << 30, (8, 6), 46)]);
//! let blank = Blank::install(&settings)?;
//! let output = blank.command("target/debug/my-test").arg("--child").output()?;
//! let books = blank.books()?;
//! println!("{} bytes at the most", books[0].device(0).peak());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A test describes the machine to its child processes with [`Settings`]. After a child has ended
//! or crashed, the test reads what the driver counted ([`Books`]) and what it did, in order
//! ([`read_journal`]). While a child runs, the test can take memory away as if another process held
//! it ([`Books::set_taken_by_others`]).
//!
//! # How memory is counted
//!
//! - An allocation counts the bytes asked for, without a driver's own rounding, at the time of the
//!   call.
//! - A free takes effect at the time of the call. With [`Completions::Late`], a stream-ordered free
//!   takes effect when the stream reaches it.
//! - A device holds its context from the first retain on. Releasing the last retain drops the
//!   context, unless memory is still held on the device.
//! - No address is ever reused, so a use after free is always detected.
//!
//! # Misuse
//!
//! Whatever a debug allocator would detect is written to the journal and counted
//! ([`DeviceBooks::misuses`]): a second free, a free of unknown memory, copies and kernel arguments
//! outside live memory, and work on a stream or event that does not exist. A function the driver
//! does not implement is missing from the library, and cudarc names it when it looks it up.
//!
//! NCCL is not included.

mod books;
mod install;
mod journal;
mod settings;

pub mod driver;

pub use books::{Books, BooksError, Call, DeviceBooks, MAX_DEVICES};
pub use install::{Blank, InstallError};
pub use journal::{Entry, Journal, JournalError, read_journal};
pub use settings::{Completions, Device, Fault, KernelTimes, SETTINGS_VARIABLE, Settings, Target};
