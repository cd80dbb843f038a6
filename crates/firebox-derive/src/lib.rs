//! `#[derive(MicroBatch)]`: generates the impl that cuts a struct field by field.
//!
//! The macro reads the attributes (`attributes`), finds the crate of the trait (`home`) and writes
//! the impl (`expand`). It does not decide how items are counted and cut: the generated code calls
//! the trait's crate for that.

use proc_macro::TokenStream;
use syn::{DeriveInput, parse_macro_input};

mod attributes;
mod expand;
mod home;

// Documented at the re-export in `firebox-batch`. Examples here would compile burn once more for
// the host, because this crate and its tests are built for the host.
#[allow(missing_docs)]
#[proc_macro_derive(MicroBatch, attributes(micro_batch))]
pub fn derive_micro_batch(input: TokenStream) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    home::find()
        .and_then(|home| expand::expand(&input, &home))
        .unwrap_or_else(syn::Error::into_compile_error)
        .into()
}
