//! `#[derive(MicroBatch)]`: the impl that cuts a struct field by field.
//!
//! The macro reads the attributes (`attributes`), finds where the trait is (`home`) and writes the impl (`expand`).
//! How items are counted and cut is not decided here: the generated code calls the trait's crate.

use proc_macro::TokenStream;
use syn::{DeriveInput, parse_macro_input};

mod attributes;
mod expand;
mod home;

// Documented where it is re-exported, in `firebox-batch`: examples there do not compile burn once more for the host,
// on which this crate and its tests are built.
#[allow(missing_docs)]
#[proc_macro_derive(MicroBatch, attributes(micro_batch))]
pub fn derive_micro_batch(input: TokenStream) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    home::find()
        .and_then(|home| expand::expand(&input, &home))
        .unwrap_or_else(syn::Error::into_compile_error)
        .into()
}
