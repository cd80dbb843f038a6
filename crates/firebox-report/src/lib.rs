//! Pictures of where the memory of a training step goes: a page to look into, a chart for a
//! document, and events for Perfetto.
//!
//! A [`DeviceReport`] follows a saved trace on one device. [`html`] makes one page of several,
//! which needs nothing but a browser. `story.rs` computes the numbers behind all pictures,
//! `pages.rs` what lies where on the pages of firebox's pool.

mod chart;
mod device;
mod html;
mod pages;
mod perfetto;
mod story;

pub use chart::{png, svg};
pub use device::{DeviceReport, ReportError};
pub use html::html;
pub use pages::Page;
pub use perfetto::perfetto;
pub use story::{Held, Story};
