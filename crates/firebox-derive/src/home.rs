//! Finds the crate in which the generated code looks up the trait: the facade if it is a
//! dependency, otherwise the trait's own crate.

use proc_macro_crate::{FoundCrate, crate_name};
use proc_macro2::Span;
use quote::quote;
use syn::{Ident, Path, parse_quote};

/// The facade, which re-exports everything a user needs, then the crate that defines the trait.
const HOMES: [&str; 2] = ["firebox", "firebox-batch"];

/// The path of the crate that holds `MicroBatch` and `__derive`.
///
/// # Errors
/// Neither crate is a dependency.
pub fn find() -> syn::Result<Path> {
    for home in HOMES {
        let name = match crate_name(home) {
            // The crate's own tests and examples refer to it by its own name.
            Ok(FoundCrate::Itself) => home.replace('-', "_"),
            Ok(FoundCrate::Name(name)) => name,
            Err(_) => continue,
        };
        let name = Ident::new(&name, Span::call_site());
        return Ok(parse_quote!(::#name));
    }
    Err(syn::Error::new_spanned(
        quote!(MicroBatch),
        "cannot find the trait `MicroBatch`: add `firebox` to the dependencies in `Cargo.toml`",
    ))
}
