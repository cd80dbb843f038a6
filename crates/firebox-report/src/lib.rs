//! Pictures of where the memory of a training step goes: a page to look into, a chart for a
//! document, and events for Perfetto.
//!
//! A [`DeviceReport`] follows a step on one device. [`html`] makes one page of several, which needs
//! nothing but a browser. `story.rs` computes the numbers behind all pictures,
//! `pages.rs` what lies where on the pages of firebox's pool.

#[cfg(feature = "chart")]
mod chart;
mod device;
mod html;
mod page;
#[cfg(feature = "saved")]
mod pages;
mod perfetto;
#[cfg(feature = "saved")]
mod saved;
mod story;

#[cfg(feature = "chart")]
pub use chart::{png, svg};
pub use device::{DeviceReport, ReportError};
pub use html::html;
pub use page::{Page, Placed};
pub use perfetto::perfetto;
pub use story::{Held, Story};
